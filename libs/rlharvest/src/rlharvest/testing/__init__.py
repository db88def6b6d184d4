"""For tests of rlharvest and of what is built on it: real servers, a stub engine, a clock that is turned by hand."""
