"""Whether splitting changes what is computed: parts against the whole, beyond chance."""
