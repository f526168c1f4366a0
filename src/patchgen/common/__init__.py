"""What every room uses: whole files, messages, progress bars and plug-ins."""
