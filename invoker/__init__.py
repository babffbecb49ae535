"""The agent of one host: it carries out the scheduler's commands and passes requests on to containers.

``commands.py`` takes the commands, ``containers/`` starts and ends instances, ``drivers/`` runs containers, ``ports/``
serves the gateways, and ``heartbeat.py`` reports how the host stands.
"""
