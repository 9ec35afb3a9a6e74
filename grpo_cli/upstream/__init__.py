"""Names of TRL, transformers, accelerate and vLLM that are not part of their public interface.

Owns one file for each library, with the version it was read in; `tests/unit/upstream/test_upstream.py` fails with
the name that changed. The fallbacks for a missing name stay where the name is used.
"""
