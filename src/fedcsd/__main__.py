from fedcsd.cli import main

main()
