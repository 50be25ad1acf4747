"""The step loop, its clients and what turns tokens into outputs."""
