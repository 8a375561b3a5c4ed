"""Several ranks: agreements on sizes, votes on outcomes, and guards for collectives."""
