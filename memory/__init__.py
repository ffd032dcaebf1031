"""Memory of a session: planned before weights are read, with advice where it does not fit."""
