"""Models, and the contract that a model of the user's own keeps (`slimpipe.models.contract`)."""
