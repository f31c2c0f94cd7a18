"""The planner as a service: jobs, plans, runs and pages over HTTP."""
