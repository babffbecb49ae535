"""What is found out when a function is deployed: whether its model would start, its packages, its image."""
