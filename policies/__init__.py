"""Who decides where a request goes: the allocator policies, and the base class that checks them."""
