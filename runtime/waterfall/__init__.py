"""Drawing a timeline: from a snapshot's JSON to a picture, in the terminal or as a page."""
