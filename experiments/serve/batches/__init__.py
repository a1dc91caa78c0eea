"""The batch API of the server: files of requests, and the batches that run them."""
