"""Many runs: a recipe is expanded to jobs, an engine does those that are not done, and all state is in run folders."""
