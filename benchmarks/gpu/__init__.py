"The parts of gpu_suite.py: a module each, found by name."
