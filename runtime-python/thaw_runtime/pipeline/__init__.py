"""What the stages of a group say to one another, whatever engine computes them."""
