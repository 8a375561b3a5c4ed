"""Does splitting change a model's gradient, and why?"""
