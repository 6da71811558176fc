"""Tables and pictures of artifacts and of search results. It reads and decides nothing."""
