"""One case over HTTP, and the reviewer's page."""
