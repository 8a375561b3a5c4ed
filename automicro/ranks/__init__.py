"""Several ranks: agreeing on sizes, voting on outcomes, and guarding what they wait for."""
