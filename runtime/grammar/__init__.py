"""Grammars: which tokens an answer may go on with. One value for every way to ask, one library behind it."""
