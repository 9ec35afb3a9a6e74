"""The command line: parse, call one function, hand its result to `output`."""
