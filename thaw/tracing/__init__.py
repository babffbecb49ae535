"""Where the seconds of a start went: the events, intervals and evidence of a trace, and the least time possible."""
