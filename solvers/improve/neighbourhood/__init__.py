"""Large neighbourhood search: better plans near the incumbent, fed by bulk simulation."""
