"""FastDeploy's own cache manager interface."""
