"""Ways from this program to controllers and pods: directly, through an API server, by a URL."""
