"""Large neighbourhood search: better plans near the best plan of a session, fed by bulk simulation."""
