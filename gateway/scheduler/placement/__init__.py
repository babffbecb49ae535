"""The papers' algorithms and their cost model.  They are pure, and turn values into a choice with its reasons."""
