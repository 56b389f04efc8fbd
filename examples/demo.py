"""The demo: capture a training run, with and without donation, and replay both.

Runs the command line as a user would type it; everything it prints and draws is made now.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(os.path.relpath(Path(__file__).parent))
OUT = Path("demo-out")
POLICIES = "bfc,best_fit,first_fit,ideal"
DEVICES = f"{HERE / 'pocket.toml'},t4,h100"


def run(*arguments: str, answers: tuple[int, ...] = (0,)) -> None:
    """Show a command and run it; stop the demo if it ends with another code than expected."""
    print(f"\n$ alloclab {' '.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "alloclab", *arguments], check=False).returncode
    if code not in answers:
        sys.exit(f"demo: alloclab ended with exit code {code}")


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    for name, arguments in {"plain": [], "donated": ["--donate"]}.items():
        trace = str(OUT / f"{name}.jsonl.zst")
        script = str(HERE / "transformer.py")
        run("capture", script, "-o", trace, "--", "--steps", "4", *arguments)
        run("replay", trace, "--policy", POLICIES, "--device", DEVICES, answers=(0, 1))
        run("plot", trace, "--device", "t4", "-o", str(OUT / f"{name}.png"))
        run("plot", trace, "--device", "t4", "--kind", "addresses",
            "-o", str(OUT / f"{name}-addresses.svg"))  # fmt: skip
    print(f"\nThe figures are in {OUT}: look at plain.png and donated.png side by side.")


if __name__ == "__main__":
    main()
