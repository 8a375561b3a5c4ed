"""Memory savers: what makes a microbatch smaller than one row does, toggled for an attempt."""
