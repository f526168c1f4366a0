def all_inputs(*a): pass
