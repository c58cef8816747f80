"""Tool calling: which functions a request offers, and how each family of models writes its calls.

One file a format, each with one `ToolFormat`; `choose.py` lists them.
"""
