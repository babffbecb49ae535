"""The papers' algorithms and their cost model: they turn values into a choice with its reasons.  Pure, without the
view."""
