"""One file a kind, or a family of kinds; `registry.py` lists them."""
