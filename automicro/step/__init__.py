"""One optimization batch: propose, attempt, commit or roll back, until it fits."""
