"""What a training step will hold of a device, before there is one."""
