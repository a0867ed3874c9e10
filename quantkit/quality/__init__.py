"""How far a model is from its source: measures, bounds, the gate, verify."""
