"""HTTP from the socket up, and web servers as sources: `http://host/folder`, `https://host/folder`."""
