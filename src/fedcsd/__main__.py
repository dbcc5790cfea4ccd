from fedcsd.cli.main import main

main()
