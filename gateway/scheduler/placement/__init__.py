"""The papers' algorithms and their cost model: values in, a choice with its reasons out.  Pure, and knows no view."""
