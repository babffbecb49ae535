"""The scheduler's decisions on each event.  ``decide.py`` takes the events and calls one file for each subject.

A function here reads the view and returns decisions; the loop carries them out.  All of it is pure.
"""
