"""The update: losses, packing, optimizer, reference policy, checkpoint."""
