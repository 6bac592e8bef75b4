"""Start, watch, stop and talk to SGLang servers."""
