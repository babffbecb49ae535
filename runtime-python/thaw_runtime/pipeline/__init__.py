"""The messages between the stages of a group, independent of the engine that computes the stages."""
