"""The node cache: verified parts on a local disk, so that the second container on a node need not
fetch them.
"""
