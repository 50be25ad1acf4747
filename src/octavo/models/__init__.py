"""Model families: a weight table and a forward for each."""
