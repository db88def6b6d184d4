"""What a run costs: prices and billing rules, leases, bills, forecasts, budgets. Pure and exact: integers and fractions."""
