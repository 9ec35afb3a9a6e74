"""A CUDA device that is not there, for tests of what would run on one."""
