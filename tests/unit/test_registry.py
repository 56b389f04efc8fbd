"""Policies written as text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloclab.policies.errors import InputError
from alloclab.policies.registry import known_policies, parse_policies, parse_policy


def test_names_options_and_defaults() -> None:
    found = parse_policies(" first_fit( granularity = 512 ) , ideal,best_fit")
    assert [str(each) for each in found] == ["first_fit(granularity=512)", "ideal", "best_fit"]
    assert str(parse_policy("first_fit", {"granularity": "1KiB", "other": "1"})) == (
        "first_fit(granularity=1024)"
    )


def test_what_a_policy_prints_reads_back() -> None:
    for name in known_policies():
        assert str(parse_policy(name)) == name


@pytest.mark.parametrize(
    "text",
    ["", ",", "ideal,", "ideal(", "ideal)", "ideal(a)", "ideal(a=)", "nobody", "ideal ideal",
     "first_fit(granularity=512,granularity=512)", "first_fit(granularity=first_fit(a=1))"],
)  # fmt: skip
def test_unreadable_text_is_one_clear_line(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_policies(text)
    assert "\n" not in str(error.value)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"known: .*best_fit.*ideal"):
        parse_policy("nobody")


@given(st.text("bfc(),=.:ideal \n\u00e9", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_policies(text)
    except InputError as error:
        assert str(error).startswith("policy ")


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from alloclab.policies.base import Policy\n"
        "class Mine(Policy):\n"
        "    'Refuses all.'\n"
        "    def place(self, request): return None\n"
        "    def release(self, address, size): pass\n"
        "other = 1\n"
    )
    assert type(parse_policy(f"{file}:Mine")).__doc__ == "Refuses all."
    with pytest.raises(InputError, match="no policy class other"):
        parse_policy(f"{file}:other")
    with pytest.raises(InputError, match="there is no file"):
        parse_policy(f"{tmp_path}/absent.py:Mine")
    file.with_name("broken.py").write_text("1/0")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        parse_policy(f"{tmp_path}/broken.py:Mine")
