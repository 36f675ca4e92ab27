"""What a save is: its storage, its versions and views, who else can reach it, its stored range."""
