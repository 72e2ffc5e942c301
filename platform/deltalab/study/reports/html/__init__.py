"""Reports as HTML: the forest of all arms and tasks, a notebook's answer, and a page that needs no server."""
