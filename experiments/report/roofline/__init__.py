"""`windtunnel roofline`: where batches lie under the roofline of a GPU."""
