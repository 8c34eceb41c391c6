"""Studies: arms of equal cost, the plan of their runs, and the workers that train them."""
