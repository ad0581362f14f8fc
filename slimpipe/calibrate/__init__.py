"""`slimpipe calibrate`: measures what the simulator and the planner want to know of a machine."""
