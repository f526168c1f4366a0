"""Many runs: a recipe is expanded to jobs, an engine runs the missing ones, and all state is in run folders."""
